from collections.abc import Callable
from typing import Any

def set_torch(offset: int, type: type, *addresses: int) -> None: ...
def trim() -> None: ...
def set_limit(bytes: int, /) -> None: ...
def memory() -> tuple[int, int]: ...

class Plan:
    owner: Any
    pure: bool
    def __new__(
        cls,
        steps: tuple[tuple[Any, ...], ...],
        lodged: tuple[tuple[int, Any], ...],
        outputs: tuple[tuple[str, Any], ...],
        symbols: tuple[tuple[int, int], ...],
        constants: tuple[Any, ...],
        inputs: int,
        slots: int,
        arena: int,
        numbers: tuple[tuple[int, ...], tuple[Any, ...]] | None,
        resolve: Callable[[tuple[Any, ...]], Any] | None,
        owner: Any,
        grain: float,
    ) -> Plan: ...
    def __call__(self, *values: Any) -> tuple[Any, ...]: ...
