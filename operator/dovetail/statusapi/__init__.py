"""The status REST API: reads jobs and their coordinators for people and programs; changes nothing."""
