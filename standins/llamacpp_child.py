"""A real llama.cpp server in a process of its own: prints its address, and ends when its input does.

`python -m standins.llamacpp_child MODEL.gguf TOKENS SLOTS PORT exact|default`: one thread, `TOKENS` of context for
each of `SLOTS` requests at a time, any free port for 0. `exact`: keys and values are float32, without flash attention,
as exact as llama.cpp can be; else as it comes.

Its server is the one in the package `xllamacpp`, which stays out of the caller's process.
"""

# xllamacpp is compiled, and has no stubs.
# pyright: reportAttributeAccessIssue=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import sys

import xllamacpp


def main(path: str, slot_tokens: int, slots: int, port: int, precision: str) -> None:
    """Serve on 127.0.0.1 until the input ends."""
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = slot_tokens * slots
    params.n_parallel = slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_threads_http = 2 * slots + 2
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.cache_ram_mib = 0
    if precision == "exact":
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.fit_params = params.ui = params.warmup = False
    server = xllamacpp.Server(params)
    sys.stdout.write(server.listening_address + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
