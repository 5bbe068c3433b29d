"""Speed of training, side by side with other libraries. A tool beside the package: nothing imports it."""
