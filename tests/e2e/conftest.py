"""The user's own cache folder is not touched by tests, whatever they start."""
import os
import tempfile

_cache = tempfile.TemporaryDirectory(prefix="calla-cache-")
os.environ["XDG_CACHE_HOME"] = _cache.name
