"""What a peer (or ours) offers for one case, in the form that `cupyattn bench` has as well."""

from cupyattn.bench.candidate import Candidate as Candidate
from cupyattn.bench.candidate import Unsupported as Unsupported
