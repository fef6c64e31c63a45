"""KV pages <-> staging slots <-> files: through host memory, or through CUDA."""
