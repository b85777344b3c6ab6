"""The plan for a memory budget: the programme that finds it, its record, its front and picture."""

from .make import Planner as Planner
from .make import largest as largest
from .make import plan as plan
from .make import planner as planner
from .record import GIB as GIB
from .record import Group as Group
from .record import Plan as Plan
from .record import Point as Point
from .record import load_plan as load_plan
