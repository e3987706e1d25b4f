"""An engine that scores given tokens, as SGLang and as vLLM, with many alternatives.

Run as a module, with the engine stand-in's own options.
"""

import json
from typing import Any

from benchmarks.kit import standin
from stenograph.engine.vllm.request import VLLMRoute


class Scoring(standin.Answers):
    """Answers to requests for scores; all else is as the stand-in says."""

    def answer(self, path: bytes, body: bytes) -> list[bytes]:
        asked: dict[str, Any] = json.loads(body) if body else {}
        if path.decode() == VLLMRoute.GENERATE.value:
            if not asked.get("token_ids"):
                return [standin.head(b"400 Bad Request", 2), b"{}"]
            told = of_vllm(asked)
        elif "logprob_start_len" in asked:
            told = of_sglang(asked)
        else:
            return super().answer(path, body)
        text = json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()
        return [standin.head(b"200 OK", len(text)), text]


def of_sglang(asked: dict[str, Any]) -> dict[str, Any]:
    ids = asked["input_ids"][asked["logprob_start_len"] :]
    best = [[-0.25 - place, place, None] for place in range(asked["top_logprobs_num"])]
    rows = [[None, ids[0], None], *[[-0.5, id_, None] for id_ in ids[1:]]]
    return {
        "meta_info": {
            "id": asked["rid"],
            "input_token_logprobs": rows,
            "input_top_logprobs": [None, *[best] * (len(rows) - 1)],
        }
    }


def of_vllm(asked: dict[str, Any]) -> dict[str, Any]:
    best = {
        str(1000 + place): {"logprob": -0.25 - place, "rank": place + 1, "decoded_token": "春"}
        for place in range(asked["sampling_params"]["prompt_logprobs"])
    }
    rows = [{str(id_): {"logprob": -0.5, "rank": 30, "decoded_token": "a"}, **best} for id_ in asked["token_ids"][1:]]
    request_id = f"generate-tokens-{asked['request_id']}"
    return {"request_id": request_id, "choices": [{"index": 0}], "prompt_logprobs": [None, *rows]}


if __name__ == "__main__":
    standin.Answers = Scoring  # type: ignore[misc]  # the way of `main` to it
    standin.main()
