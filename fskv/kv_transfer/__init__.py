"""The judgement of `--kv-transfer-config`, in vLLM's words: pure, for the adapters and for tools."""
