"""What `capture` and `gguf_capture` make traces with."""
