//! Stands in for a backend that was not built in. It has no values, so its methods are never called.
#![cfg_attr(all(feature = "cuda", feature = "wgpu"), allow(dead_code))]

use crate::base::error::Result;
use crate::ops::op::sealed::Sealed;
use crate::ops::op::{Device, Kernel, Op};
use crate::ops::variants::Choice;

/// No value.
#[derive(Debug, Clone, Copy)]
pub enum Absent {}

impl Sealed for Absent {}

impl Device for Absent {
    type Buffer = Self;
    type Recorder<'r> = Self;

    fn name(&self) -> String {
        match *self {}
    }
    fn id(&self) -> u64 {
        match *self {}
    }
    fn buffer(&self, _: u64) -> Result<Self> {
        match *self {}
    }
    fn upload(&self, _: &Self, _: u64, _: &[u8]) -> Result<()> {
        match *self {}
    }
    fn download(&self, _: &Self, _: u64) -> Result<Vec<u8>> {
        match *self {}
    }
    fn submit(&self, _: impl FnOnce(Self) -> Result<()>) -> Result<()> {
        match *self {}
    }
    fn size(buffer: &Self) -> u64 {
        match *buffer {}
    }
    fn offset(a: &Self, _: &Self) -> Option<i64> {
        match *a {}
    }
}

impl<O: Op> Kernel<O> for Absent {
    type Kernels = Self;
    type Step = Self;
    type Binding = Self;

    fn kernel_compile(&self, _: &O, _: &O::Options) -> Result<(Self, O::Facts, Choice)> {
        match *self {}
    }
    fn kernel_step(&self, _: &O, _: &Self, _: O::Capacity) -> Result<Self> {
        match *self {}
    }
    fn kernel_prepare(&self, _: &O, _: &Self, _: &mut Self, _: O::Input<'_>) -> Result<O::Extent> {
        match *self {}
    }
    fn kernel_bind(&self, _: &O, _: &Self, _: &O::Args<&Self>, _: O::Extent) -> Result<Self> {
        match *self {}
    }
    fn kernel_record(&self, _: &O, _: &Self, _: &mut Self, _: &Self, _: &Self) -> Result<()> {
        match *self {}
    }
}
