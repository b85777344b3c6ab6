"""The record of a fit and its JSON: everything read is validated, nothing that is read runs."""

from .approximants import FLAT as FLAT
from .approximants import Approximant as Approximant
from .approximants import Approximates as Approximates
from .approximants import Floats as Floats
from .approximants import Kind as Kind
from .approximants import PublishedApproximant as PublishedApproximant
from .approximants import Quotient as Quotient
from .approximants import Radical as Radical
from .approximants import Single as Single
from .approximants import codes as codes
from .approximants import has_pole as has_pole
from .approximants import variable as variable
from .fit import AnyFit as AnyFit
from .fit import GateFit as GateFit
from .fit import InvertedFit as InvertedFit
from .fit import LearnedFit as LearnedFit
from .fit import OutputFit as OutputFit
from .fit import StepFit as StepFit
from .reading import from_json as from_json
from .reading import read as read
from .validate import check_bits as check_bits
from .validate import check_domain as check_domain
from .weights import Calibration as Calibration
from .weights import Site as Site
from .weights import read_weights as read_weights
from .weights import site as site
