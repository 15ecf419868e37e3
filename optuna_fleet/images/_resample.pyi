from typing import Any

import numpy as np
from numpy.typing import NDArray

def resized_crop(
    image: NDArray[np.uint8], box: tuple[int, int, int, int], out: NDArray[Any], mirrored: bool
) -> None: ...
