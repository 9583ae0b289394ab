"""What running requests weigh: bookings, and prompts that fade with time."""

__all__: list[str] = []
