"""The explorer of notebook 09: sliders over a recorded trace, and figures that update at once."""
