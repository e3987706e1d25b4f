"""Arguments of a chat template are few: they live as long as their turn."""

import pytest

from stenograph.core.errors import InvalidRequest
from stenograph.dialects.common.template_input import MAX_VALUES, check_template_kwargs


@pytest.mark.parametrize("depth", [0, 1])
def test_the_values_of_all_levels_count(depth: int) -> None:
    values: list[object] = [{}] * (MAX_VALUES - 1 - depth)
    kwargs = {"a": [values] if depth else values}
    check_template_kwargs(kwargs, at="/x")
    values.append(None)
    with pytest.raises(InvalidRequest, match="16385") as caught:
        check_template_kwargs(kwargs, at="/x")
    assert caught.value.param == "/x"
