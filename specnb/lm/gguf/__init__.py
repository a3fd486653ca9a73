"""Models in llama.cpp, through its C API: loading, forward passes and state.

Only `binding` imports llama_cpp.
"""
