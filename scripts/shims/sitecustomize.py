"""The registry's torchvision does not find its operators beside a CPU's torch: two are declared before its import."""

import importlib.abc
import sys
from typing import Any


class _DeclaredFirst(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch  # noqa: PLC0415 - in SGLang's environment, and only where torchvision is wanted

        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        sys.modules["_declared_for_torchvision"] = library  # type: ignore[assignment] - kept as long as the process


sys.meta_path.insert(0, _DeclaredFirst())
