from collections.abc import Callable
from typing import Any

class Kernel:
    __name__: str
    owner: Any
    def __init__(
        self,
        stages: tuple[tuple[int, int, float], ...],
        owner: Any,
        make: Callable[..., Any],
        outputs: tuple[tuple[Any, dict[str, Any]], ...],
        name: str,
        inputs: int,
        order: tuple[int, ...],
        sizes: int,
        moving: bool,
        grain: float,
    ) -> None: ...
    def __call__(self, *arguments: Any) -> tuple[Any, ...]: ...

def set_torch(
    offset: int, data_pointer: int, parallel: int, max_threads: int, thread_number: int, team_size: int
) -> None: ...
