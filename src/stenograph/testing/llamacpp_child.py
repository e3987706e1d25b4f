"""A real llama.cpp server in a process of its own: prints its address, and ends when its input does.

`python -m stenograph.testing.llamacpp_child MODEL.gguf TOKENS SLOTS`: one thread, `TOKENS` of context for each of
`SLOTS` requests at a time. Its server is the one in the package `xllamacpp`, which stays out of the caller's process.
"""

# xllamacpp is compiled, and has no stubs.
# pyright: reportAttributeAccessIssue=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import sys

import xllamacpp


def main(path: str, slot_tokens: int, slots: int) -> None:
    """Serve on a free port of 127.0.0.1 until the input ends."""
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = slot_tokens * slots
    params.n_parallel = slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_threads_http = 2 * slots + 2
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.cache_ram_mib = 0
    params.fit_params = params.ui = params.warmup = False
    server = xllamacpp.Server(params)
    sys.stdout.write(server.listening_address + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
