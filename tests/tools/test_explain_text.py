"""`fskv explain --prompt`: a text becomes the token ids that a server makes of it."""

from __future__ import annotations

import json

import pytest
from test_explain import FULL, TOKENS, Prompted, identity_of
from token_server import TokenServer
from tool_lab import fskv, run

TEXT = "What is the capital of France?"
OURS = (200, json.dumps({"count": len(TOKENS), "tokens": TOKENS}))


@pytest.fixture
def lab(tmp_path):
    lab = Prompted(tmp_path / "kv")
    lab.store(identity_of(FULL), TOKENS, range(10))
    return lab


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def serve():
    started = []

    def start(*args, **options):
        started.append(TokenServer(*args, **options))
        return started[-1]

    yield start
    for one in started:
        one.shutdown()
        one.server_close()


def explained(lab, prompt, *options):
    done = run("explain", "--prompt", prompt, "--json", *options, root=lab.path)
    return done.exit_code, done.summary and done.summary["hit_tokens"]


def test_a_server_makes_the_ids_and_says_whose_namespace_it_is(lab, prompt, serve):
    lab.chunks(lab.namespace(), range(2))  # of another model
    server = serve(OURS, lab.namespace_of(identity_of(FULL)).id)
    assert explained(lab, prompt, "--url", server.url) == (0, 320)
    assert server.asked == [("/tokenize", {"prompt": TEXT})]
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    prompt.write_text(json.dumps(chat))
    assert explained(lab, prompt, "--url", server.url) == (0, 320)
    assert server.asked[1:] == [("/tokenize", chat)]
    nameless = run("explain", "--prompt", prompt, "--url", serve(OURS).url, root=lab.path)
    assert nameless.exit_code == 2
    assert "expected NAMESPACE, the root has 2 namespaces: " in nameless.stderr


def test_the_text_where_two_prompts_part_is_quoted(lab, prompt, serve):
    changed = [*TOKENS[:100], TOKENS[100] + 1, *TOKENS[101:]]
    how = ("--prompt", prompt, "--url", serve((200, json.dumps({"tokens": changed}))).url)
    done = run("explain", "--json", *how, root=lab.path)
    (first, *_) = [line["text"] for line in done.lines if line["type"] == "cause"]
    assert "in tokens 96 to 127: 'text of 32 tokens'" in first
    # The control: of token ids alone nobody knows the text.
    done = run("explain", "--tokens", json.dumps(changed), root=lab.path)
    assert "in tokens 96 to 127" in " ".join(done.stdout.split())
    assert "text of" not in done.stdout


@pytest.mark.parametrize("caching", [True, False])
def test_a_server_without_prefix_caching_hits_nothing(lab, prompt, serve, caching):
    server = serve(OURS, caching=caching)
    done = run("explain", "--prompt", prompt, "--url", server.url, root=lab.path)
    assert done.exit_code == (0 if caching else 1)
    assert ("prefix caching is off in this server" in done.stderr) is not caching


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--prompt needs --url"),
        (["--url", "http://127.0.0.1:1"], "--url: http://127.0.0.1:1/metrics: "),
        (["--url", "what is this"], "--url: found 'what is this', expected http://HOST:PORT"),
    ],
)
def test_what_cannot_tokenize_is_one_sentence(lab, prompt, options, words):
    done = fskv("explain", "--prompt", prompt, *options, root=lab.path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr


@pytest.mark.parametrize(
    ("answer", "words"),
    [((404, "{}"), "HTTP 404"), ((200, "<html>"), "token 0: found '<html>'")],
)
def test_a_server_that_does_not_tokenize_is_one_sentence(lab, prompt, serve, answer, words):
    done = run("explain", "--prompt", prompt, "--url", serve(answer).url, root=lab.path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr
