"""From a model's config.json and engine options to groups, chunks, disk and load time; no engine, no root."""
