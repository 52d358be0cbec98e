#!/usr/bin/env python3
"""Whether calla serve says on one backend what it says on another.

  tools/cuda_texts.py CALLA BACKEND REFERENCE [MODEL]

Greedy answers of the reference, one at a time, are compared with the backend's: one at a time, all at
once (batches), and all once more (from the prefix cache). Two answers may part where the reference's
two best tokens lie within MARGIN; before that, log-probabilities differ by at most DIFFERENCE.
"""
import http.client, json, re, subprocess, sys, tempfile, threading, time

MARGIN, DIFFERENCE, TOKENS = 0.05, 0.1, 64
SYSTEM = "You are a careful engineer who answers in short words. " * 30
QUESTIONS = ["What is the capital of France?", "Tell me a long story about a fox and the sea.",
             "Repeat after me: the apple is mine.", "What is 17 plus 25?",
             "What is the capital of Japan?", "Repeat after me: the river is mine.",
             "Tell me about bread.", "What is 3 times 9?"]
ASKS = [[{"role": "system", "content": SYSTEM}] * (i % 4 == 3) + [{"role": "user", "content": q}]
        for i, q in enumerate(QUESTIONS)]


class Server:
    def __init__(self, calla, backend, model):
        self.log = tempfile.NamedTemporaryFile(mode="w+")
        self.process = subprocess.Popen(
            [calla, "serve", "--port", "0", "--backend", backend, "--parallel", "8", "--cache-disk", "0",
             "--ctx", "4096", *(["-m", model] if model else [])], stderr=self.log,
            stdin=subprocess.DEVNULL)
        while not (found := re.search(r"http://[^/]*:(\d+)/", open(self.log.name).read())):
            if self.process.poll() is not None:
                sys.exit(f"{backend}: {open(self.log.name).read()}")
            time.sleep(0.05)
        self.port = int(found.group(1))

    def ask(self, messages):
        """[(token, log-probability, margin to the second)]"""
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        c.request("POST", "/v1/chat/completions",
                  json.dumps({"messages": messages, "max_tokens": TOKENS, "temperature": 0,
                              "logprobs": True, "top_logprobs": 2}), {"Content-Type": "application/json"})
        r = c.getresponse()
        body = json.loads(r.read())
        if r.status != 200:
            sys.exit(f"status {r.status}: {body}")
        return [(t["token"], t["logprob"], t["logprob"] - t["top_logprobs"][1]["logprob"])
                for t in body["choices"][0]["logprobs"]["content"]]

    def ask_together(self):
        out = [None] * len(ASKS)

        def one(i):
            out[i] = self.ask(ASKS[i])
        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(ASKS))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return out

    def close(self):
        self.process.terminate()
        return self.process.wait()


def compare(name, want, got):
    """Prints a line; false: an answer parts where it must not."""
    equal = tokens = worst = 0
    faults = []
    for i, (a, b) in enumerate(zip(want, got)):
        if b is None:
            faults.append(f"{QUESTIONS[i]!r} has no answer")
            continue
        parted = False
        for (token, logprob, margin), other in zip(a, b):
            if token != other[0]:
                parted = True
                if margin >= MARGIN:
                    faults.append(f"{QUESTIONS[i]!r}: {other[0]!r} for {token!r}, margin {margin:.3f}")
                break
            tokens += 1
            worst = max(worst, abs(logprob - other[1]))
        equal += not parted and len(a) == len(b)
        if not parted and len(a) != len(b):
            faults.append(f"{QUESTIONS[i]!r}: {len(b)} tokens for {len(a)}")
    if worst > DIFFERENCE:
        faults.append(f"log-probabilities differ by {worst:.3f}")
    print(f"{name}: {equal} of {len(want)} answers equal, {tokens} tokens alike, log-probabilities within "
          f"{worst:.4f}", *faults, sep="\n  FAIL ", flush=True)
    return not faults


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    calla, backend, reference = sys.argv[1:4]
    model = sys.argv[4] if len(sys.argv) > 4 else None
    server = Server(calla, reference, model)
    want = [server.ask(m) for m in ASKS]
    server.close()
    server = Server(calla, backend, model)
    good = compare("one at a time", want, [server.ask(m) for m in ASKS])
    good = compare("all at once", want, server.ask_together()) and good
    good = compare("once more", want, server.ask_together()) and good
    code = server.close()
    print(f"the server ended with {code}")
    return 0 if good and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
