"""FskvConnector: fskv.offload as vLLM's offloading connector."""
