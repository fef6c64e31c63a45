"""Nothing is read."""

ImageReadMode = decode_image = None
