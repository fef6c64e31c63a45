"""Nothing is converted."""

pil_to_tensor = None
