"""Chat: conversion of messages to token ids and back, the same in rollouts, in the router and in mid-training."""
