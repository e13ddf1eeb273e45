"""From a trained model to a fast served one: conversion, quantization, tuning. Every way ends in a model directory."""
