"""What `--kv-transfer-config` may say of fskv, in vLLM's words: pure, for the adapters and for tools."""
