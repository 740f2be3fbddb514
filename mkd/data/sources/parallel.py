"""A parallel map over batches, in worker processes."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from mkd.errors import MkdDataError


def map_in_order[Item, Result](
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, advice: str
) -> Iterator[Result]:
    """Yield results in the order of the items, with at most a few items per worker in memory.

    Args:
        function: function of one item; function, items and results can be pickled.
        items: its arguments.
        workers: processes; 1 runs the function in this process.
        advice: remedy in the message when a worker is killed.

    Raises:
        MkdDataError: a worker was killed. Errors of `function` are passed on.
    """
    if workers == 1:
        yield from map(function, items)
        return
    # One thread per worker: the tokenizer's own threads would compete with the other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pending = deque()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > 4 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise MkdDataError(f"a worker process was killed, perhaps for lack of memory: {advice}") from None
        finally:
            pool.shutdown(cancel_futures=True)
