"""The audit job: does a model's routing say more about its errors than its confidence does?"""
