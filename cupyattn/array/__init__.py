"""Arrays of any framework: views of them, their streams, and answers as the caller's own arrays."""

from .memory import acquire as acquire
from .memory import adjoined as adjoined
from .memory import allocator as allocator
from .memory import as_cupy as as_cupy
from .memory import as_numpy as as_numpy
from .memory import as_strided as as_strided
from .memory import byte_range as byte_range
from .memory import current_stream as current_stream
from .memory import deliver as deliver
from .memory import empty as empty
from .memory import empty_on as empty_on
from .memory import from_numpy as from_numpy
from .memory import release as release
from .memory import restride as restride
from .memory import row_major as row_major
from .memory import same_device as same_device
from .memory import scaled as scaled
from .memory import stream_reader as stream_reader
from .memory import to_host as to_host
from .memory import writable_copy as writable_copy
from .views import CPU as CPU
from .views import LOWEST_ADDRESS as LOWEST_ADDRESS
from .views import ArrayView as ArrayView
from .views import Device as Device
from .views import refuse_gpus as refuse_gpus
from .views import view as view
