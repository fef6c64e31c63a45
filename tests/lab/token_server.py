"""A tokenizer of words, and a server that tokenizes as vLLM's does."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def make_tokenizer(directory):
    """Make a model's directory with a tokenizer of w0 to w96 that puts a token before each text."""
    import tokenizers

    words = {"<s>": 0, **{f"w{number}": number + 1 for number in range(97)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    directory.mkdir()
    made.save(str(directory / "tokenizer.json"))
    return directory


class TokenServer(ThreadingHTTPServer):
    """As vLLM's: /tokenize, /detokenize, and /metrics with the namespaces of its engines."""

    def __init__(self, answer, *namespaces, caching=True):
        self.answer = answer
        self.caching = caching
        self.namespaces = namespaces
        self.asked = []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        info = "vllm:fskv_namespace_info"
        lines = [f'{info}{{engine="0",namespace="{name}"}} 1.0' for name in self.server.namespaces]
        lines.append(f'vllm:cache_config_info{{enable_prefix_caching="{self.server.caching}"}} 1.0')
        self._send(200, "\n".join([f"# TYPE {info} gauge", *lines, ""]))

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, json.loads(content)))
        if self.path == "/detokenize":
            numbers = self.server.asked[-1][1]["tokens"]
            self._send(200, json.dumps({"prompt": f"text of {len(numbers)} tokens"}))
        else:
            self._send(*self.server.answer)

    def _send(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass
