"""The benching job: does leaving early pay, for this model, on this data, on this machine?"""
