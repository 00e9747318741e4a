"""The status REST API. It reads jobs and their coordinators for people and programs, and changes nothing."""
