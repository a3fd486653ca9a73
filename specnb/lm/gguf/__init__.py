"""llama.cpp through its C interface: opening, forwards, state, and conversion of folders to GGUF.

Only `binding` imports llama_cpp. The engine knows token ids; text is its vocabulary's business.
"""
