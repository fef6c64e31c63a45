"""The live screen: what is read of a root and of engines (watch), what it means (state), its look (frame)."""
