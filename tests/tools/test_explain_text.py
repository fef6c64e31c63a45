"""`fskv explain --prompt`: a text becomes the token ids that an engine makes of it, whoever tokenizes."""

from __future__ import annotations

import json
import os

import pytest
from test_explain import FULL, Prompted, identity_of
from token_server import TokenServer, make_tokenizer
from tool_lab import fskv, run

tokenizers = pytest.importorskip("tokenizers", reason="it comes with vLLM")

TEXT = " ".join(f"w{number % 97}" for number in range(330))
CHUNKS = 10


@pytest.fixture
def model(tmp_path):
    return make_tokenizer(tmp_path / "model")


@pytest.fixture
def tokens(model):
    return tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT).ids


@pytest.fixture
def lab(tmp_path, tokens):
    lab = Prompted(tmp_path / "kv")
    lab.store(identity_of(FULL), tokens, range(CHUNKS))
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


@pytest.mark.parametrize("name", ["", "/tokenizer.json"])
def test_the_models_tokenizer_makes_the_ids_and_the_only_namespace_needs_no_name(
    lab, model, prompt, name
):
    assert explained(lab, prompt, "--tokenizer", f"{model}{name}") == (0, 32 * CHUNKS)
    prompt.write_text("w1 " + TEXT)  # the control
    assert explained(lab, prompt, "--tokenizer", f"{model}{name}") == (1, 0)


def test_a_server_makes_the_ids_and_says_whose_namespace_it_is(lab, prompt, tokens, serve):
    lab.chunks(lab.namespace(), range(2))  # of another model
    server = serve(
        (200, json.dumps({"count": 331, "tokens": tokens})), lab.namespace_of(identity_of(FULL)).id
    )
    assert explained(lab, prompt, "--url", server.url) == (0, 32 * CHUNKS)
    assert server.asked == [("/tokenize", {"prompt": TEXT})]
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    prompt.write_text(json.dumps(chat))
    assert explained(lab, prompt, "--url", server.url) == (0, 32 * CHUNKS)
    assert server.asked[1:] == [("/tokenize", chat)]


@pytest.mark.parametrize("by_server", [False, True])
def test_the_text_where_two_prompts_part_is_quoted(lab, model, prompt, tokens, serve, by_server):
    words = TEXT.split()
    changed = [*words[:100], "w7", *words[101:]]  # w3, in chunk 3: a token stands before the text
    prompt.write_text(" ".join(changed))
    if by_server:
        ids = (
            tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
            .encode(" ".join(changed))
            .ids
        )
        how = ("--url", serve((200, json.dumps({"tokens": ids}))).url)
        quoted = "'text of 32 tokens'"
    else:
        how, quoted = ("--tokenizer", model), " ".join(changed[95:105])
    done = run("explain", "--prompt", prompt, "--json", *how, root=lab.path)
    (first, *_) = [line["text"] for line in done.lines if line["type"] == "cause"]
    assert "in tokens 96 to 127: " in first
    assert quoted in first
    # The control: of token ids alone nobody knows the text.
    done = run("explain", "--tokens", json.dumps([*tokens[:101], 8, *tokens[102:]]), root=lab.path)
    assert quoted not in done.stdout


@pytest.mark.parametrize("caching", [True, False])
def test_a_server_without_prefix_caching_hits_nothing(lab, prompt, tokens, serve, caching):
    server = serve((200, json.dumps({"tokens": tokens})), caching=caching)
    done = run("explain", "--prompt", prompt, "--url", server.url, root=lab.path)
    assert done.exit_code == (0 if caching else 1)
    assert ("prefix caching is off in this server" in done.stderr) is not caching


def test_of_several_namespaces_one_is_asked_for(lab, model, prompt):
    lab.chunks(lab.namespace(), range(2))
    done = run("explain", "--prompt", prompt, "--tokenizer", model, root=lab.path)
    assert done.exit_code == 2
    assert "expected NAMESPACE, the root has 2 namespaces: " in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "expected one of --url and --tokenizer"),
        (["--tokenizer", "/etc/hostname"], "expected a directory with tokenizer.json"),
        (["--tokenizer", "/no/such/model"], "/no/such/model: No such file"),
        (["--url", "http://127.0.0.1:1"], "--url: http://127.0.0.1:1/metrics: "),
        (["--url", "what is this"], "--url: found 'what is this', expected http://HOST:PORT"),
    ],
)
def test_what_cannot_tokenize_is_one_sentence(lab, prompt, options, words):
    done = fskv("explain", "--prompt", prompt, *options, root=lab.path, env={"HF_HUB_OFFLINE": "1"})
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr


@pytest.mark.parametrize("part", ["normalizer", "fifo", ""], ids=["panics", "fifo", "control"])
def test_a_tokenizer_that_ends_its_library_or_never_comes_is_one_sentence(lab, prompt, model, part):
    path = model / "tokenizer.json"
    found = {**json.loads(path.read_bytes())}
    if part == "normalizer":  # a PanicException is no Exception
        found[part] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path.unlink()
    if part == "fifo":
        os.mkfifo(path)
    else:
        path.write_text(json.dumps(found))
    done = fskv("explain", "--prompt", prompt, "--tokenizer", model, root=lab.path, timeout_s=60)
    assert done.exit_code == (2 if part else 0), done
    assert (f"{model}" in done.stderr) is bool(part)


@pytest.mark.parametrize(
    ("answer", "words"), [((404, "{}"), "HTTP 404"), ((200, "<html>"), "token 0: found '<html>'")]
)
def test_a_server_that_does_not_tokenize_is_one_sentence(lab, prompt, serve, answer, words):
    done = run("explain", "--prompt", prompt, "--url", serve(answer).url, root=lab.path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr


def test_a_chat_is_for_a_server(lab, model, prompt):
    prompt.write_text('{"messages": []}')
    done = run("explain", "--prompt", prompt, "--tokenizer", model, root=lab.path)
    assert (done.exit_code, "give --url" in done.stderr) == (2, True)
