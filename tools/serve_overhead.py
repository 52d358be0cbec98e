#!/usr/bin/env python3
"""What calla serve adds to the model's own time, with a model so small that it shows.

  tools/serve_overhead.py [--model DIR] [--clients 1,4,16] [--threads N] [--tokens N] [--runs N]

For each number of clients a server is started with as many sequences at a time, and two things are measured:

  first byte   requests one after another from each client, a connection each: from before it is
               made to the first byte of the reply's head; beside it the same for GET /health, which the
               engine has no part in
  token        each client streams --tokens tokens, all at once; the gap between two tokens of a stream, less
               the time of a forward pass (calla_compute_seconds_total / calla_steps_total over the
               same time), is what sampling, text, JSON, HTTP and the client cost

The client is a loop over raw sockets in one process. It shares the machine with the server, so its
own time is in the figures; --threads leaves a processor to it. The table is Markdown.
"""
import argparse, gc, json, os, re, selectors, socket, statistics, subprocess, sys, tempfile, time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROMPT = 48     # tokens; every client has its own
ASKS = 60       # requests a client for the first byte
WARM = 10       # tokens of a stream that are not counted


class Server:
    def __init__(self, calla, model, clients, threads):
        self.log = tempfile.NamedTemporaryFile(mode="w+")
        self.process = subprocess.Popen(
            [calla, "serve", "-m", model, "--port", "0", "--parallel", str(clients), "--quiet",
             "--threads", str(threads)], stderr=self.log, stdin=subprocess.DEVNULL)
        while not (found := re.search(r"http://[^/]*:(\d+)/", open(self.log.name).read())):
            if self.process.poll() is not None:
                sys.exit(open(self.log.name).read())
            time.sleep(0.02)
        self.port = int(found.group(1))

    def close(self):
        self.process.terminate()
        self.process.wait()

    def connect(self):
        s = socket.create_connection(("127.0.0.1", self.port))
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return s

    def metrics(self):
        s = self.connect()
        s.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        out = b""
        while piece := s.recv(65536):
            out += piece
        s.close()
        found = dict(re.findall(r"^calla_(\w+) (\S+)$", out.decode().replace("\r", ""), re.M))
        return float(found["compute_seconds_total"]), float(found["steps_total"])


def post(path, body):
    data = json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n").encode() + data


def request(which, tokens, stream=True):
    """Greedy, of prompt number `which`."""
    ids = [(which * 7919 + i * 2654435761 % (1 << 32)) % 8000 for i in range(PROMPT)]
    return post("/v1/completions", {"prompt": ids, "max_tokens": tokens, "temperature": 0,
                                    "stream": stream, "model": "m"})


def find_prompts(server, count, tokens):
    """Prompts whose answers do not end by themselves."""
    found = []
    for which in range(20 * count + 20):
        s = server.connect()
        s.sendall(request(which, tokens, False))
        reply = b""
        while b'"usage":' not in reply and (piece := s.recv(65536)):
            reply += piece
        s.close()
        if b'"finish_reason":"length"' in reply:
            found.append(which)
        if len(found) == count:
            return found
    sys.exit(f"too few prompts have answers of {tokens} tokens; choose fewer --tokens")


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def first_bytes(server, prompts, health=False):
    """Seconds to the first byte. Each client asks again when its reply has ended."""
    selector, found, clients = selectors.DefaultSelector(), [], len(prompts)
    left = clients * ASKS

    def ask(which):
        data = HEALTH if health else request(which, 2)
        start = time.perf_counter()
        s = server.connect()
        s.sendall(data)
        selector.register(s, selectors.EVENT_READ, [which, start, b""])
    for which in prompts:
        ask(which)
    while left:
        for key, _ in selector.select():
            now, state = time.perf_counter(), key.data
            piece = key.fileobj.recv(65536)
            if not state[2]:
                found.append(now - state[1])
            state[2] += piece
            if not piece or (b"}" if health else b"0\r\n\r\n") in state[2]:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                left -= 1
                if left >= clients:
                    ask(state[0])
    return found


def streams(server, prompts, tokens):
    """Gaps between the tokens of a stream while all stream; and seconds of a forward pass."""
    selector, times = selectors.DefaultSelector(), [[] for _ in prompts]
    for c, which in enumerate(prompts):
        s = server.connect()
        s.sendall(request(which, tokens))
        selector.register(s, selectors.EVENT_READ, c)
    begun = before = after = None
    open_streams = len(prompts)
    while open_streams:
        for key, _ in selector.select():
            now = time.perf_counter()
            piece = key.fileobj.recv(65536)
            mine = times[key.data]
            mine += [now] * piece.count(b"data: {")
            if not piece or b"[DONE]" in piece:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                open_streams -= 1
                after = after or (server.metrics(), len(mine))
        if begun is None and min(map(len, times)) > WARM:
            begun, before = time.perf_counter(), server.metrics()
    end = min(t[-1] for t in times)
    gaps = [b - a for t in times for a, b in zip(t, t[1:]) if a >= begun and b <= end]
    (c1, s1), (c0, s0) = after[0], before
    return gaps, (c1 - c0) / (s1 - s0)


def cut(values, share):
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    a.add_argument("--calla", default=os.path.join(ROOT, "build", "calla"))
    a.add_argument("--model", default=os.path.join(ROOT, "models", "demo"))
    a.add_argument("--clients", default="1,4,16")
    a.add_argument("--threads", type=int, default=1)
    a.add_argument("--tokens", type=int, default=400)
    a.add_argument("--runs", type=int, default=3)
    o = a.parse_args()
    gc.disable()
    print("| clients | /health p50 ms | p99 ms | first byte p50 ms | p99 ms | forward pass ms | gap p50 ms | p99 ms | "
          "added to a token p50 ms | p99 ms | mean ms |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for clients in map(int, o.clients.split(",")):
        health, first, gaps, added, passes = [], [], [], [], []
        server = Server(o.calla, o.model, clients, o.threads)
        try:
            prompts = find_prompts(server, clients, o.tokens)
            streams(server, prompts, o.tokens)
            for _ in range(o.runs):
                health += first_bytes(server, prompts, True)
                first += first_bytes(server, prompts)
                found, one = streams(server, prompts, o.tokens)
                gaps += found
                added += [g - one for g in found]
                passes.append(one)
        finally:
            server.close()
        ms = [cut(health, .5), cut(health, .99), cut(first, .5), cut(first, .99),
              statistics.mean(passes), cut(gaps, .5), cut(gaps, .99),
              cut(added, .5), cut(added, .99), statistics.mean(added)]
        print(f"| {clients} | " + " | ".join(f"{1000 * v:.3f}" for v in ms) + " |", flush=True)


if __name__ == "__main__":
    main()
