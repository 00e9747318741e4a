"""What a user runs beside a job: doctor, chat, replay, the run page, and looks at data."""
