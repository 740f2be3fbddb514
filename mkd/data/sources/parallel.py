"""The same function on many batches, in worker processes."""

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
    """Results in the order of the items; holds at most a few items a worker in memory.

    Args:
        function: can be pickled, as items and results can.
        items: what it is called with.
        workers: processes; 1 does it in this one.
        advice: what to change when a worker is killed, for the message.

    Raises:
        MkdDataError: a worker was killed; also whatever `function` raises.
    """
    if workers == 1:
        yield from map(function, items)
        return
    # one thread a worker: the tokenizer's own threads would compete with the other workers
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
