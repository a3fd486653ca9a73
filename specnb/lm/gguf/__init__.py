"""llama.cpp through its C interface: opening, forwards and state.

Only `binding` imports llama_cpp. The engine knows token ids; text is its vocabulary's business.
"""
