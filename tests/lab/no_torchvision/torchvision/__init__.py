"""As much of torchvision as it takes to import classes that process images, for engines that see none."""

__version__ = "0.28.0"
