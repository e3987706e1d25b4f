"""The time of an update of the embedded engine's weights, and of the steps beside it.

    python -m benchmarks.weight_swap [--forward numpy] [--rounds 5] [--folder /dev/shm]

Writes SmolLM2-135M's weights (the packaged model) as float32 safetensors, 538 MB, and swaps them while 16 sequences
decode: read, prepared and swapped as in the engine's process, with the loop and the desk that it has. Prints, for each
round, the seconds from the command to its answer, the milliseconds that the swap took between two steps, and steps in
three spans of time: undisturbed, while files were read (up to the swap), and after the swap, when what was preempted is
computed again in steps of up to 256 tokens. `_cpu` is the CPU time of the stepping thread: on a busy machine it holds,
and the others do not. First the files are read without an engine, to new memory and to the same again, as
the first round and those after it do. Then one line of JSON. A swap waits for the step under way.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType] - its PathLike has no argument

from stenograph.core.clock import SystemClock
from stenograph.core.types import RequestId, SamplingParams
from stenograph.embedded.engine_core import EngineCore, EngineLimits
from stenograph.embedded.forward.choice import make_forward
from stenograph.embedded.forward.weight_memory import WeightMemory
from stenograph.embedded.forward.weights import LlamaConfig, LlamaWeights, load_weights
from stenograph.embedded.grammar.cache import GrammarCompiler
from stenograph.embedded.loop import EngineLoop
from stenograph.embedded.weight_desk import WeightDesk
from stenograph.embedded.wire import Control, ControlKind, Controlled, Failed, Sampled
from stenograph.model.fetch import resolve_model
from stenograph.model.files import load_model_files
from stenograph.model.progress import StreamProgress
from stenograph.model.settings import default_cache_dir
from stenograph.model.tokenizer import Tokenizer
from stenograph.parts import ForwardKind, TorchDtype

NUM_SEQUENCES, PROMPT_TOKENS = 16, 12


def write_folder(folder: Path, config: LlamaConfig, weights: LlamaWeights) -> int:
    """A Hugging Face folder of the same weights in float32; returns the bytes of its tensors."""
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors: dict[str, NDArray[np.float32]] = {
        "model.embed_tokens.weight": weights.embed,
        "model.norm.weight": weights.final_norm,
    }
    for index, layer in enumerate(weights.layers):
        at = f"model.layers.{index}."
        query, key, value = np.split(layer.qkv, [q_rows, q_rows + kv_rows])
        gate, up = np.split(layer.gate_up, 2)
        tensors |= {
            at + "input_layernorm.weight": layer.attn_norm,
            at + "self_attn.q_proj.weight": query,
            at + "self_attn.k_proj.weight": key,
            at + "self_attn.v_proj.weight": value,
            at + "self_attn.o_proj.weight": layer.out,
            at + "post_attention_layernorm.weight": layer.ffn_norm,
            at + "mlp.gate_proj.weight": gate,
            at + "mlp.up_proj.weight": up,
            at + "mlp.down_proj.weight": layer.down,
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    told = {
        "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": config.hidden,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "intermediate_size": config.ffn,
        "vocab_size": config.vocab_size, "rope_theta": config.rope_theta, "rms_norm_eps": config.rms_eps,
        "max_position_embeddings": config.max_context, "tie_word_embeddings": config.tied_embeddings,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(told))
    return sum(tensor.nbytes for tensor in tensors.values())


class TimedLoop(EngineLoop):
    """A loop that notes when it did something between two steps, and how long that took."""

    acts: list[tuple[float, float]]

    def between_steps(self, act: Callable[[], None]) -> None:
        def timed() -> None:
            begin = time.perf_counter()
            act()
            self.acts.append((begin, time.perf_counter() - begin))

        super().between_steps(timed)


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step: how many tokens it sampled, when it began, how long it took, and the CPU time of its thread."""

    num_sampled: int
    begin: float
    wall_s: float
    cpu_s: float


class TimedCore(EngineCore):
    """A core that notes its steps."""

    steps: list[TimedStep]

    def step(self) -> list[Sampled | Failed]:
        begin, cpu = time.perf_counter(), time.thread_time()
        events = super().step()
        self.steps.append(TimedStep(len(events), begin, time.perf_counter() - begin, time.thread_time() - cpu))
        return events


class Rig:
    """The engine as its process has it, on threads of this one."""

    def __init__(self, path: Path, kind: ForwardKind) -> None:
        config, weights = load_weights(path)
        limits = EngineLimits(max_batch=NUM_SEQUENCES, kv_tokens=65536)
        forward = make_forward(
            config, weights, kind=kind, device="cpu", dtype=TorchDtype.FLOAT32, num_kv_tokens=limits.num_kv_rows
        )
        tokenizer = Tokenizer(load_model_files(path).tokenizer_json)
        self.loop = TimedLoop(tokenizer, num_workers=0, emit=lambda events: None, clock=SystemClock())
        self.loop.acts = []
        grammars = GrammarCompiler(lambda: tokenizer, vocab_size=config.vocab_size, eos_ids=(2,))
        self.core = TimedCore(
            forward, lambda: tokenizer, grammars, eos_ids=(2,),
            limits=limits, clock=SystemClock(), wake=self.loop.wake, weight_version="0",
        )  # fmt: skip
        self.core.steps = []
        self.answers: dict[RequestId, Future[Controlled]] = {}
        self.desk = WeightDesk(
            forward, self.core, self.loop, lambda told: self.answers[told.request_id].set_result(told)
        )
        self.loop.start(self.core)

    def wait_until_all_decode(self) -> float:
        """Wait for ten steps in a row in which every sequence got a token; returns when they began."""
        first = len(self.core.steps)
        while len(last := self.core.steps[first:][-10:]) < 10 or min(s.num_sampled for s in last) < NUM_SEQUENCES:
            time.sleep(0.02)
        return last[0].begin

    def update(self, folder: Path, version: str) -> float:
        """Swap; returns the seconds until the answer."""
        name, begin = RequestId(version), time.perf_counter()
        self.answers[name] = Future()
        self.desk.obey(Control(request_id=name, kind=ControlKind.LOAD, path=str(folder), version=version))
        told = self.answers[name].result()
        assert not told.problem, told.problem
        return time.perf_counter() - begin


def told_of(name: str, steps: Sequence[TimedStep], begin: float, end: float) -> dict[str, float]:
    """Median and longest of the steps that fell in a span of time, in part at least."""
    among = [step for step in steps if step.begin < end and step.begin + step.wall_s > begin]
    return {
        f"{name}_p50_ms": 1e3 * statistics.median(step.wall_s for step in among),
        f"{name}_max_ms": 1e3 * max(step.wall_s for step in among),
        f"{name}_max_cpu_ms": 1e3 * max(step.cpu_s for step in among),
    }


def updated(rig: Rig, folder: Path, version: str) -> dict[str, float]:
    """Update once; returns the round's figures."""
    before = rig.wait_until_all_decode()
    begin = time.perf_counter()
    answer_s = rig.update(folder, version)
    decoding = rig.wait_until_all_decode()
    swapped, swap_s = rig.loop.acts[-1]
    return {
        "answer_s": answer_s,
        "swap_ms": swap_s * 1e3,
        **told_of("quiet", rig.core.steps, before, begin),
        **told_of("reading", rig.core.steps, begin, swapped),
        **told_of("after", rig.core.steps, swapped + swap_s, decoding),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--forward", type=ForwardKind, default=ForwardKind.NUMPY)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    asked = options.parse_args()
    path = resolve_model("smollm2-135m", cache_dir=default_cache_dir(os.environ), progress=StreamProgress(sys.stderr))
    folder = asked.folder / f"weight-swap-{os.getpid()}"
    try:
        num_bytes = write_folder(folder, *load_weights(path))
        memory, reads_s = WeightMemory(), [0.0, 0.0]
        for number in range(len(reads_s)):
            cpu = time.thread_time()
            load_weights(folder, memory)
            reads_s[number] = time.thread_time() - cpu
        sys.stdout.write(f"read alone: {reads_s[0]:.3f} s of CPU to new memory, {reads_s[1]:.3f} to the same again\n")
        del memory
        rig = Rig(path, asked.forward)
        for index in range(NUM_SEQUENCES):
            prompt = array("i", [1 + (7 * index + at) % 4000 for at in range(PROMPT_TOKENS)])
            rig.loop.add_request(prompt, SamplingParams(max_tokens=7000, ignore_eos=True, seed=index))
        rows: list[dict[str, float]] = []
        for number in range(1, asked.rounds + 1):
            rows.append(updated(rig, folder, str(number)))
            sys.stdout.write("  ".join(f"{name} {value:.3f}" for name, value in rows[-1].items()) + "\n")
            sys.stdout.flush()
        worst = {f"worst_{name}": round(max(row[name] for row in rows), 3) for name in rows[0]}
        told = {
            "bench": "weight_swap",
            "bytes": num_bytes,
            "rounds": len(rows),
            "read_cpu_s": reads_s[0],
            "read_again_cpu_s": reads_s[1],
            **worst,
        }
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # the sequences go on


if __name__ == "__main__":
    if "OPENBLAS_NUM_THREADS" not in os.environ:  # as the engine's process has it; too late once NumPy is imported
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.weight_swap", *sys.argv[1:]])
    main()
