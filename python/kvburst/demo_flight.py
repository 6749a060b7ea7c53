"""What the flight recorder is told of a demo run: the forward, which the controller knows nothing
of, and when each layer of the load was in place."""

from collections.abc import Sequence

from kvburst._core import ComputeDevice, Event, Stream
from kvburst.controller import BurstController
from kvburst.demo_forward import ForwardEvents
from kvburst.demo_options import DemoOptions
from kvburst.timeline import FORWARD, GATE, LAUNCH, SCHEDULER, STREAMS, FlightRecorder, Span


def new_recorder(options: DemoOptions, device: ComputeDevice, rank: int) -> FlightRecorder:
    title = f"{options.geometry}, mode {options.mode}, groups {options.groups}"
    if options.shard and options.link is None:
        title += ", exchanged by gloo: times of this CPU and of no GPU"
    return FlightRecorder(
        device,
        title,
        rank=rank,
        simulated=None if options.link is None else f"link {options.link}",
    )


def landing_events(
    device: ComputeDevice, controller: BurstController, burst: int, stream: Stream
) -> list[Event]:
    """By layer: its bytes were there. Of a load whose forward has been launched, so that no wait of
    the forward's is found to have begun here."""
    events = []
    for layer in range(controller.layer_done_counter.num_layers):
        controller.layer_done_counter.events[burst].wait(layer, stream)
        event = device.new_event()
        event.record(stream)
        events.append(event)
    return events


def record_forward(
    recorder: FlightRecorder,
    *,
    hand_over_ns: tuple[int, int],
    launch_ns: tuple[int, int],
    forward: ForwardEvents,
    landed: Sequence[Event],
) -> None:
    """Once all of it is over. Nanoseconds of `time.perf_counter_ns`, from and to. ``landed`` may be
    of no layer: one that comes from another rank is there when its exchange is over."""
    for name, (begin, end) in (
        ("load + start_loading", hand_over_ns),
        (LAUNCH, launch_ns),
    ):
        recorder.add(Span(SCHEDULER, name, begin / 1000, end / 1000))
    layers = zip(forward.arrived, forward.passed, forward.done, strict=True)
    for layer, (arrived, passed, done) in enumerate(layers):
        recorder.on_stream(GATE, f"wait for layer {layer}", arrived, passed, layer=layer)
        recorder.on_stream(FORWARD, f"layer {layer}", passed, done, layer=layer)
    for layer, in_place in enumerate(landed):
        recorder.on_stream(STREAMS["load"], f"layer {layer} is there", in_place, layer=layer)
