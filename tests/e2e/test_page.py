"""The chat page in headless Chromium: against a stand-in that speaks the API and says what we want
to see, and against `calla serve` with the demo model. Screenshots go to build/screenshots/.

Needs Chromium (apt-get install chromium) and the playwright package, which is put into
build/venv-page when pip can fetch it; without them the tests are skipped."""
import glob
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CALLA = os.path.join(ROOT, "build", "calla")
VENV = os.path.join(ROOT, "build", "venv-page")
SHOTS = os.path.join(ROOT, "build", "screenshots")

STORY = "The fox went down to the lighthouse and the lamp was lit. "
RICH = '''## A hash table

It keeps **keys** and *values* in an array; `hash(key) % size` says where. See [the article](https://example.org/a_(b)) or https://example.org/x.

1. Compute the hash.
2. Go to the slot:
   - free: store it,
   - taken: try the next.
3. Grow when it is ~~full~~ three quarters full.

| operation | average | worst |
|---|:-:|--:|
| find | O(1) | O(n) |
| insert | O(1) | O(n) |

```c
/* Linear probing. */
static struct slot *table_find(struct table *t, const char *key)
{
    size_t i = hash_text(key) % t->size;   // where it belongs
    while (t->slots[i].key && strcmp(t->slots[i].key, key) != 0)
        i = (i + 1) % t->size;
    return &t->slots[i];
}
```

> A full table never ends its search.

- [x] done
- [ ] not done

---
2 * 3 * 4 = 24, snake_case_name stays, C:\\\\path too.'''
EVIL = '''<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>

[a](javascript:window.pwned=1) [b](data:text/html,x) ![c](https://evil.example/c.png) <a href="https://evil.example">d</a>

```html"><script>window.pwned=1</script>
<b>code</b>
```
| <b>x</b> | y |
|---|---|
| `<i>` | <svg onload=window.pwned=1> |
''' + "[" * 3000 + "*" * 3000 + "_a" * 500 + "> " * 100 + "x"


class StandIn:
    """Answers by the last message: its first word chooses what is said."""

    def __init__(self):
        self.requests, self.gone, self.key = [], 0, None
        self.delay = 0.01
        stand_in = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *a):
                pass

            def reply(self, status, body, kind="application/json", **headers):
                body = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key.replace("_", "-"), value)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def refused(self):
                if stand_in.key and self.headers.get("Authorization") != "Bearer " + stand_in.key:
                    self.reply(401, {"error": {"message": "The API key is wrong."}})
                    return True

            def do_GET(self):
                if self.path == "/":
                    page = open(os.path.join(ROOT, "web", "index.html"), "rb").read()
                    return self.reply(200, page, "text/html; charset=utf-8")
                if self.refused():
                    return
                if self.path == "/v1/models":
                    return self.reply(200, {"data": [{"id": "mlx-community/Qwen3.6-35B-A3B-4bit"}]})
                if self.path == "/props":
                    return self.reply(200, {"backend": "cpu/avx2", "context": 32768})
                self.reply(404, {"error": {"message": "There is no " + self.path}})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.refused():
                    return
                stand_in.requests.append(body)
                try:
                    stand_in.answer(self, body)
                except (BrokenPipeError, ConnectionResetError):
                    stand_in.gone += 1
                    self.close_connection = True

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, handler, body):
        last = body["messages"][-1]
        text = last["content"] if last["role"] == "user" else "thanks"
        word = text.split()[0].lower()
        if word == "busy":
            return handler.reply(503, {"error": {"message": "The queue is full."}}, Retry_After="7")
        if word == "refuse":
            return handler.reply(400, {"error": {"message": "'logit_bias' is not supported."}})
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True

        def write(data):
            handler.wfile.write(data)
            handler.wfile.flush()

        def delta(reason=None, **fields):
            event = {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}
            write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")
            time.sleep(self.delay)

        write(b": waiting\n\n")
        delta(role="assistant", content="")
        if body["chat_template_kwargs"]["enable_thinking"] and word != "plain":
            for piece in re.findall(r"\S+\s*", "The user asks something. " * 6):
                delta(reasoning_content=piece)
        if word == "fault":
            delta(content="So far ")
            return write(b'data: {"error": {"message": "The logits are not finite."}}\n\n')
        if word == "drop":
            return delta(content="So far ")
        if word == "tool":
            delta(tool_calls=[{"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}])
            for piece in ('{"city": ', '"Par', 'is", "days": 3}'):
                delta(tool_calls=[{"index": 0, "function": {"arguments": piece}}])
            delta(tool_calls=[{"index": 1, "id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}])
            delta(reason="tool_calls")
        elif word == "split":  # characters cut between two writes, and lines that end in CRLF
            event = json.dumps({"choices": [{"index": 0, "delta": {"content": "Grüße 🦊 日本"}}]}, ensure_ascii=False)
            for byte in b"data: " + event.encode() + b"\r\n\r\n":
                write(bytes([byte]))
            delta(reason="stop")
        else:
            text = {"rich": RICH, "plain": RICH, "evil": EVIL, "story": STORY * 40, "long": "x" * 30 + " \n\n" + STORY * 200}.get(word, STORY * 2)
            for piece in re.findall(r"\s*\S{1,12}|\s+$", text):
                delta(content=piece)
            delta(reason="length" if word == "long" else "stop")
        usage = {"prompt_tokens": 1210, "completion_tokens": 57, "prompt_tokens_details": {"cached_tokens": 1024}}
        write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")


def need_playwright():
    if not shutil.which("chromium"):
        pytest.skip("chromium is not installed")
    if not glob.glob(VENV + "/lib/python3*/site-packages/playwright"):
        try:
            subprocess.run([sys.executable, "-m", "venv", VENV], check=True, capture_output=True)
            subprocess.run([VENV + "/bin/pip", "install", "-q", "--retries", "0", "--timeout", "10", "playwright==1.65.2"],
                           check=True, capture_output=True, timeout=300)
        except (OSError, subprocess.SubprocessError) as e:
            pytest.skip(f"the playwright package cannot be installed: {e}")
    for folder in glob.glob(VENV + "/lib/python3*/site-packages"):
        if folder not in sys.path:
            sys.path.append(folder)
    return pytest.importorskip("playwright.sync_api")


@pytest.fixture(scope="module")
def browser():
    api = need_playwright()
    os.makedirs(SHOTS, exist_ok=True)
    with api.sync_playwright() as p:
        b = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        yield b
        b.close()


@pytest.fixture
def stand_in():
    s = StandIn()
    yield s
    s.close()


class Calla:
    def __init__(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.url, self.requests = f"http://127.0.0.1:{port}/", None
        self.process = subprocess.Popen([CALLA, "serve", "--port", str(port)], stdout=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE)
        for _ in range(100):
            try:
                urllib.request.urlopen(self.url + "health", timeout=2).close()
                return
            except OSError:
                assert self.process.poll() is None, self.process.stderr.read().decode()
                time.sleep(0.1)
        raise AssertionError("calla serve does not answer")

    def close(self):
        self.process.terminate()
        self.process.communicate(timeout=20)


@pytest.fixture(params=["stand-in", "calla"])
def server(request):
    if request.param == "calla":
        if subprocess.run([CALLA, "serve", "--help"], capture_output=True).returncode != 0:
            pytest.skip("this build has no calla serve")
        s = Calla()
    else:
        s = StandIn()
    s.kind = request.param
    yield s
    s.close()


def until(page, script, seconds=60):
    """Waits without eval, which the page's own policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(script):
        assert time.monotonic() < end, script
        page.wait_for_timeout(20)


class Page:
    """A tab that fails its test on a script error or on a request to another host."""

    def __init__(self, browser, url, width=1280, **more):
        phone = width < 700
        self.context = browser.new_context(viewport={"width": width, "height": 800 if phone else 860},
                                           has_touch=phone, is_mobile=phone, device_scale_factor=1,
                                           color_scheme=more.pop("scheme", "light"), **more)
        self.page = self.context.new_page()
        self.page.set_default_timeout(15000)
        self.faults, self.url, self.width = [], url, width
        self.page.on("pageerror", lambda e: self.faults.append(str(e)))
        self.page.on("request", lambda r: self.faults.append(r.url) if not r.url.startswith((url, "data:")) else None)
        self.page.goto(url)

    def ask(self, text, wait=True):
        self.page.fill("#text", text)
        self.page.click("#go")
        if wait:
            self.wait_done()

    def wait_done(self):
        until(self.page, "!document.body.classList.contains('busy')")

    def slow(self, bytes_a_second):
        """The demo model answers faster than one can look; its stream is slowed on the way. 0: not."""
        session = self.context.new_cdp_session(self.page)
        session.send("Network.enable")
        session.send("Network.emulateNetworkConditions", {"offline": False, "latency": 0, "uploadThroughput": -1,
                                                          "downloadThroughput": bytes_a_second or -1})
        self.cdp = session

    def last(self):
        return self.page.locator(".turn.bot").last

    def shot(self, name):
        self.page.wait_for_timeout(150)
        self.page.screenshot(path=f"{SHOTS}/{name}.png")

    def check(self):
        assert self.faults == []
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the window"

    def close(self):
        self.check()
        self.context.close()


@pytest.fixture
def tab(browser, stand_in):
    t = Page(browser, stand_in.url)
    t.server = stand_in
    yield t
    t.close()


def background(page):
    return sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]))


@pytest.mark.parametrize("width", [390, 1280])
def test_ask_stream_stop_regenerate_reload_themes(browser, server, width):
    t = Page(browser, server.url, width)
    page, name = t.page, f"{server.kind}-{width}"
    if server.kind == "calla":  # answers of a known length
        page.evaluate("""localStorage.setItem("calla.settings", '{"think": false, "temperature": "0", "max_tokens": "200"}')""")
        page.reload()
    until(page, "document.getElementById('model').textContent !== 'Calla'")
    assert page.locator("#hello").is_visible()
    t.shot(f"{name}-1-empty-light")

    # Ask, and see it stream.
    if server.kind == "calla":
        t.slow(6000)
    t.ask("rich Tell me a story about a fox.", wait=False)
    until(page, "document.body.classList.contains('busy') || document.querySelector('.stats')")
    sizes = set()
    for _ in range(2000):
        sizes.add(len(t.last().inner_text()))
        if not page.evaluate("document.body.classList.contains('busy')"):
            break
    assert len(sizes) > 3, "the text grows while it comes"
    until(page, "!document.body.classList.contains('busy')")
    assert page.locator("#hello").is_hidden()
    stats = t.last().locator(".stats").inner_text()
    assert re.search(r"[\d,]+ tokens? .*tokens/s .*[\d,]+ of [\d,]+ cached", stats), stats
    t.shot(f"{name}-2-answer-light")

    # Thinking is folded and opens.
    if server.kind == "stand-in":
        think = t.last().locator("details.think")
        assert think.get_attribute("open") is None and "Thought for" in think.inner_text()
        think.locator("summary").click()
        until(page, "document.querySelector('.think').innerText.includes('The user asks')")
        t.shot(f"{name}-3-thinking-light")
        think.locator("summary").click()

    # Stop in the middle.
    t.ask("story Tell me a story about a fox.", wait=False)
    until(page, "document.querySelectorAll('.turn.bot')[1]?.querySelector('.stats')")
    assert page.get_attribute("#go", "aria-label") == "Stop"
    page.click("#go")
    t.wait_done()
    before = t.last().inner_text()
    if server.kind == "stand-in":
        assert "Stopped." in before
        page.wait_for_timeout(300)
        assert t.last().inner_text() == before and server.gone == 1
    t.shot(f"{name}-4-stopped-light")

    # Regenerate.
    if server.kind == "calla":
        t.slow(0)
    t.last().get_by_role("button", name="Regenerate").click()
    until(page, "document.body.classList.contains('busy') || document.querySelectorAll('.turn.bot .stats').length > 1")
    t.wait_done()
    assert page.locator(".turn").count() == 4
    assert "Stopped." not in t.last().inner_text()
    if server.kind == "stand-in":
        assert server.requests[-1]["messages"] == server.requests[-2]["messages"]

    # Reload: all is there, and goes on.
    texts = page.locator("#log").inner_text()
    page.reload()
    assert page.locator(".turn").count() == 4
    assert page.locator("#log").inner_text() == texts
    t.ask("And now?")
    assert page.locator(".turn").count() == 6

    # Dark.
    light = background(page)
    if width < 700:
        page.click("#menu")
    page.click("#theme")
    assert background(page) < light / 3
    if width < 700:
        t.shot(f"{name}-5-menu-dark")
        page.keyboard.press("Escape")
    t.shot(f"{name}-6-answer-dark")
    page.reload()
    assert background(page) < light / 3, "the choice is kept"
    t.close()


def test_the_system_chooses_the_theme_first(browser, stand_in):
    t = Page(browser, stand_in.url, scheme="dark")
    assert background(t.page) < 150
    t.page.emulate_media(color_scheme="light")
    t.page.wait_for_timeout(100)
    assert background(t.page) > 600
    t.close()


def test_markdown(tab):
    tab.ask("plain")
    body = tab.last().locator(".md").last
    for selector, count in {"h2": 1, "strong": 1, "em": 1, "del": 1, "ol": 1, "ol > li": 3, "li ul > li": 2, "table": 1, "th": 3,
                            "tbody tr": 2, ".block": 1, "blockquote": 1, "hr": 1, ":not(pre) > code": 1, ".k": 7}.items():
        assert body.locator(selector).count() == count, selector
    assert [a.get_attribute("href") for a in body.locator("a").all()] == ["https://example.org/a_(b)", "https://example.org/x"]
    assert body.locator("a").first.get_attribute("rel") == "noopener noreferrer"
    code = RICH.split("```c\n")[1].split("\n```")[0]
    assert body.locator("pre").inner_text() == code
    text = body.inner_text()
    assert "2 * 3 * 4 = 24, snake_case_name stays, C:\\path too." in text and "☑ done" in text
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    body.locator(".cap button").click()
    assert tab.page.evaluate("navigator.clipboard.readText()") == code


def test_text_of_the_model_is_never_markup(tab):
    start = time.monotonic()
    tab.ask("evil")
    assert time.monotonic() - start < 30
    tab.page.wait_for_timeout(100)
    assert tab.page.evaluate("window.pwned") is None
    assert tab.page.evaluate("document.querySelectorAll('#log img, #log script, #log iframe').length") == 0
    assert [a.get_attribute("href") for a in tab.last().locator("a").all()] == ["https://evil.example/c.png", "https://evil.example"]
    assert "<script>window.pwned=1</script>" in tab.last().inner_text()
    tab.page.reload()
    assert tab.page.evaluate("window.pwned") is None


def test_characters_cut_between_packets(tab):
    tab.ask("split")
    assert "Grüße 🦊 日本" in tab.last().inner_text()


def test_tool_calls(tab):
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    tab.page.click("#tune")
    tab.page.fill("[name=tools]", "{not json")
    tab.page.get_by_role("button", name="Save").click()
    assert tab.page.locator("#settings-error").is_visible()
    tab.page.fill("[name=tools]", json.dumps(tools))
    assert tab.page.locator("#settings-error").is_hidden(), "said of a text that is gone"
    tab.shot("settings")
    tab.page.get_by_role("button", name="Save").click()
    tab.ask("tool What is the weather?")
    assert tab.server.requests[-1]["tools"] == tools
    assert tab.last().locator(".call b").all_inner_texts() == ["get_weather", "get_time"]
    assert json.loads(tab.last().locator(".call pre").first.inner_text()) == {"city": "Paris", "days": 3}
    areas = tab.last().locator("textarea")
    areas.first.fill("18 degrees, rain")
    areas.last.fill("noon")
    tab.shot("tools")
    tab.last().get_by_role("button", name="Send results").click()
    tab.wait_done()
    sent = tab.server.requests[-1]["messages"]
    assert [m["role"] for m in sent] == ["user", "assistant", "tool", "tool"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris", "days": 3}'}
    assert sent[1]["reasoning_content"].startswith("The user asks")
    assert sent[2] == {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees, rain"}


@pytest.mark.parametrize("word,words", [("busy", "Try again in 7 s"), ("refuse", "'logit_bias' is not supported."),
                                        ("fault", "logits are not finite"), ("drop", "connection ended")])
def test_errors_are_shown_and_can_be_tried_again(tab, word, words):
    tab.ask(word)
    assert words in tab.last().locator(".error").inner_text()
    if word in ("fault", "drop"):
        assert "So far" in tab.last().inner_text()
    if word == "busy":
        tab.shot("error")
    tab.last().get_by_role("button", name="Try again").click()
    tab.wait_done()
    assert tab.page.locator(".turn").count() == 2


def test_no_server(tab):
    tab.context.set_offline(True)
    tab.page.fill("#text", "Hello")
    tab.page.click("#go")
    tab.wait_done()
    assert "cannot be reached" in tab.last().locator(".error").inner_text()


def test_api_key(browser, stand_in):
    stand_in.key = "sesame"
    t = Page(browser, stand_in.url)
    t.page.wait_for_selector("dialog[open]")
    t.page.fill("[name=key]", "sesame")
    t.page.get_by_role("button", name="Save").click()
    t.ask("Hello")
    assert t.last().locator(".error").count() == 0
    t.close()


def test_settings_are_sent(tab):
    tab.page.click("#tune")
    for name, value in {"system": "Be brief.", "temperature": "0.3", "max_tokens": "99"}.items():
        tab.page.fill(f"[name={name}]", value)
    tab.page.get_by_role("button", name="Save").click()
    tab.page.click("#think")
    tab.ask("Hello")
    body = tab.server.requests[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["max_tokens"]) == (0.3, 99)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["stream_options"] == {"include_usage": True}
    assert tab.last().locator("details").count() == 0


def test_edit_and_many_chats(tab):
    page = tab.page
    tab.ask("First question")
    tab.ask("Second question")
    page.locator(".turn.user").first.hover()
    page.locator(".turn.user").first.get_by_role("button", name="Edit").click()
    assert page.input_value("#text") == "First question"
    tab.ask("Other question")
    assert page.locator(".turn").count() == 2
    assert len(tab.server.requests[-1]["messages"]) == 1
    page.click("#new")
    assert page.locator("#hello").is_visible()
    tab.ask("Another chat")
    assert page.locator("#chats .open").all_inner_texts() == ["Another chat", "First question"] or \
        page.locator("#chats .open").all_inner_texts() == ["Another chat", "Other question"]
    page.locator("#chats .open").last.click()
    assert "Other question" in page.locator("#log").inner_text()
    page.locator("#chats .del").last.click()
    page.get_by_role("button", name="Keep").click()
    assert page.locator("#chats .open").count() == 2
    page.locator("#chats .del").last.click()
    tab.shot("delete")
    page.locator("#sure").get_by_role("button", name="Delete").click()
    until(page, "document.querySelectorAll('#chats .open').length === 1")


def test_another_chat_while_one_answers(tab):
    tab.ask("story one", wait=False)
    until(tab.page, "document.querySelector('.turn.bot .stats')")
    tab.page.click("#new")
    assert tab.page.locator(".turn").count() == 0
    tab.page.locator("#chats .open").first.click()
    assert tab.page.locator(".turn").count() == 2
    tab.wait_done()
    assert tab.last().inner_text().count("lighthouse") == 40


def test_reload_in_the_middle_keeps_what_came(tab):
    tab.ask("story one", wait=False)
    until(tab.page, "document.querySelector('.turn.bot > .md')?.innerText.length > 200")
    tab.page.reload()
    text = tab.last().inner_text()
    assert "lighthouse" in text and "Stopped." in text


def test_keyboard(tab):
    page = tab.page
    assert page.evaluate("document.activeElement.id") == "text"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#text") == "one\ntwo"
    page.keyboard.press("Enter")
    tab.wait_done()
    assert tab.server.requests[-1]["messages"][-1]["content"] == "one\ntwo"
    page.fill("#text", "story")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.turn.bot')[1]?.querySelector('.stats')")
    page.keyboard.press("Escape")
    tab.wait_done()
    assert "Stopped." in tab.last().inner_text()
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("(document.activeElement.id || document.activeElement.className || document.activeElement.tagName) + ''"))
    assert {"new", "theme", "tune", "text", "think", "open", "del"} <= reached, reached
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "text" and page.input_value("#text") == ""


def test_the_view_follows_until_one_scrolls_up(tab):
    page = tab.page
    tab.ask("long", wait=False)
    until(page, "(() => { const b = document.getElementById('scroll'); return b.scrollHeight > b.clientHeight + 300; })()")
    assert page.evaluate("(() => { const b = document.getElementById('scroll'); return b.scrollHeight - b.scrollTop - b.clientHeight; })()") < 60
    page.evaluate("document.getElementById('scroll').scrollTop = 0")
    page.wait_for_selector("#down:visible")
    page.wait_for_timeout(200)
    assert page.evaluate("document.getElementById('scroll').scrollTop") == 0
    page.click("#down")
    page.wait_for_timeout(200)
    assert page.locator("#down").is_hidden()
    page.keyboard.press("Escape")
    tab.wait_done()


CONTRAST = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const layers = (node) => { const out = []; for (; node; node = node.parentElement) out.unshift(getComputedStyle(node).backgroundColor); return out; };
    const paint = (colors) => { canvas.fillStyle = "#fff"; canvas.fillRect(0, 0, 1, 1);
        for (const c of colors) { canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1); } return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3); };
    const light = (rgb) => { const [r, g, b] = rgb.map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const bad = [];
    for (const node of document.querySelectorAll("body *")) {
        if (![...node.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim()) || !node.checkVisibility() || node.closest(".hide, :disabled, script, style")) continue;
        const back = layers(node), a = light(paint(back)), b = light(paint([...back, getComputedStyle(node).color]));
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) bad.push(node.tagName + "." + node.className + " " + ratio.toFixed(2) + " " + node.textContent.slice(0, 30));
    }
    return bad;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_names(browser, stand_in, scheme):
    t = Page(browser, stand_in.url, scheme=scheme)
    assert t.page.evaluate(CONTRAST) == []
    t.ask("rich")
    t.ask("busy")
    assert t.page.evaluate(CONTRAST) == []
    t.page.click("#tune")
    assert t.page.evaluate(CONTRAST) == []
    nameless = t.page.evaluate("""() => [...document.querySelectorAll("button, textarea, input, select")].filter((n) =>
        !n.textContent.trim() && !n.getAttribute("aria-label") && !n.labels?.length).map((n) => n.outerHTML)""")
    assert nameless == []
    assert t.page.locator("html").get_attribute("lang") == "en"
    t.close()


def test_fingers(browser, stand_in):
    t = Page(browser, stand_in.url, 390)
    t.ask("Hello")
    small = t.page.evaluate("""() => [...document.querySelectorAll("header button, #ask button")].filter((n) => n.checkVisibility())
        .map((n) => [n.id, n.getBoundingClientRect()]).filter(([, r]) => r.width < 38 || r.height < 38).map(([id]) => id)""")
    assert small == []
    t.page.click("#menu")
    t.page.wait_for_timeout(300)
    assert t.page.locator("#side").bounding_box()["x"] == 0
    t.page.mouse.click(380, 400)
    t.page.wait_for_timeout(300)
    assert t.page.locator("#side").bounding_box()["x"] < -200
    assert t.page.evaluate("getComputedStyle(document.getElementById('text')).fontSize") == "16px", "smaller text makes phones zoom"
    t.close()


def test_one_file_without_references():
    page = open(os.path.join(ROOT, "web", "index.html"), encoding="utf-8").read()
    assert not re.search(r"(?:src|href)=[\"'](?!#|data:)", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|@import|url\(", page)
    assert "default-src 'none'" in page
