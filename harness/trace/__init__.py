"""Where the time goes: traces of Nsight Systems, of torch.profiler and of our timeline, read and analysed.

    trace_file -> nsys_export, chrome_trace -> events -> analysis (over intervals) -> report

Each arrow is a value handed on. The two readers make the same columns, events.Trace; all that is said of a
trace is computed from those alone.
"""
