"""Any other ChatML model: its own template, as far as that goes; ours where the model brings none."""

from stenograph.families.smollm2 import chatml_template
from stenograph.text.family import Family, Signs

CHATML = Family(
    name="chatml",
    summary="any other model with `<|im_start|>` and `<|im_end|>`",
    signs=Signs(tokens=("<|im_start|>", "<|im_end|>"), template=("<|im_start|>", "<|im_end|>")),
    spare_template=chatml_template(""),
)
