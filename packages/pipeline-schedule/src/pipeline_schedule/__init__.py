"""Pipeline-parallel schedules as checked data: generators, validation, simulation, drawings, and an executor.

generate, gpipe, one_f_one_b, interleaved_1f1b, zb_h1, zb_v     make a Schedule
forward_only                                                    makes one without backwards
overlap_p2p, overlap_b_f, post_together                         make another of it
validate                                                        checks it
simulate                                                        times it: a Timeline
as_text, as_report, as_svg, save_png, as_trace                  draw that
Executor                                                        runs it
"""

from __future__ import annotations

from pipeline_schedule.actions import Action, Kind, Overlap, Step, Together
from pipeline_schedule.check import find_problems, validate
from pipeline_schedule.classic import gpipe, interleaved_1f1b, one_f_one_b
from pipeline_schedule.communication import add_communication
from pipeline_schedule.draw.png import save_png
from pipeline_schedule.draw.svg import as_svg
from pipeline_schedule.draw.text import as_report, as_text
from pipeline_schedule.draw.trace import as_trace
from pipeline_schedule.execute import Callbacks, Executor, Message, Pending
from pipeline_schedule.forward_only import forward_only
from pipeline_schedule.generate import SCHEDULE_NAMES, generate
from pipeline_schedule.memory import peak_activations
from pipeline_schedule.overlap import overlap_b_f, overlap_p2p, post_together
from pipeline_schedule.problems import Place, Problem, ScheduleError, Waiting
from pipeline_schedule.replay import Span
from pipeline_schedule.schedule import Placement, Schedule, loop_placement, vee_placement
from pipeline_schedule.serial import schedule_from_dict, schedule_to_dict
from pipeline_schedule.simulate import Costs, Timeline, simulate
from pipeline_schedule.zero_bubble import zb_h1, zb_v

__all__ = [
    "SCHEDULE_NAMES",
    "Action",
    "Callbacks",
    "Costs",
    "Executor",
    "Kind",
    "Message",
    "Overlap",
    "Pending",
    "Place",
    "Placement",
    "Problem",
    "Schedule",
    "ScheduleError",
    "Span",
    "Step",
    "Timeline",
    "Together",
    "Waiting",
    "add_communication",
    "as_report",
    "as_svg",
    "as_text",
    "as_trace",
    "find_problems",
    "forward_only",
    "generate",
    "gpipe",
    "interleaved_1f1b",
    "loop_placement",
    "one_f_one_b",
    "overlap_b_f",
    "overlap_p2p",
    "peak_activations",
    "post_together",
    "save_png",
    "schedule_from_dict",
    "schedule_to_dict",
    "simulate",
    "validate",
    "vee_placement",
    "zb_h1",
    "zb_v",
]
