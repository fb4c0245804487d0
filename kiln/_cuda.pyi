from collections.abc import Callable
from typing import Any

class Kernel:
    __name__: str
    owner: Any
    def __init__(
        self,
        starts: tuple[tuple[int, int, int, tuple[int, ...]], ...],
        owner: Any,
        make: Callable[..., Any],
        outputs: tuple[tuple[Any, dict[str, Any]], ...],
        name: str,
        inputs: int,
        sizes: int,
        moving: bool,
        device: int,
        stream: Callable[[int], int],
        context: int,
        other: Callable[..., Any] | None,
    ) -> None: ...
    def __call__(self, *arguments: Any) -> tuple[Any, ...]: ...

def set_driver(
    offset: int, data_pointer: int, launch: int, current: int, push: int, pop: int, text: int
) -> None: ...
