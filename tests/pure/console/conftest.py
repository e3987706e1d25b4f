"""Sessions by hand, as the tests of samples have them."""

from ..export.conftest import new_session

__all__ = ["new_session"]
