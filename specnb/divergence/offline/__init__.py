"""Two traces from anywhere, compared without torch: what `compare` is made of."""
