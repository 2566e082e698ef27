"""What the compiler already tells of a kernel's speed, without a GPU: launches, machine code, and a model of both.

launches.py       how a kernel is launched, recorded and not carried out; what Triton makes of that launch
machine_code.py   instructions of the main loop by pipe, as the CUDA tools read them
model.py          occupancy, and time as a share of the time that copying the bytes takes
cases.py          the passes of every operation at the shapes of the tables
"""
