//! How a device is made: what a driver offers and then refuses is an error, and is not asked for where that is known.

use std::process::Command;

use mla_support::rig::Rig;
use mla_support::{Ignored, Outcome};
use wgpu_mla::gpu::{Gpu, wanted};
use wgpu_mla::{Error, wgpu};

use super::{adapter, experimental, runs_right, spec};

const MATRICES: wgpu::Features = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX;

fn a_device_without_what_its_driver_refuses() -> Outcome {
    let gpu = mla_support::gpu()?;
    let adapter = adapter(&gpu);
    runs_right(&Rig::on(gpu, &spec()));
    let mut wanted = wanted(&adapter, experimental());
    if !wanted.features.contains(MATRICES) {
        wanted.features |= MATRICES;
        let refused = pollster::block_on(Gpu::from_adapter(adapter, &wanted)).err();
        assert!(matches!(refused, Some(Error::Device { .. })), "{refused:?}");
    }
    Ok(())
}

/// Mesa's lavapipe with vectors of 128 bits, as on aarch64: since version 26 it lists cooperative matrices there, with the feature off.
/// This program runs itself on it.
fn a_software_device_of_narrow_vectors() -> Outcome {
    let name = mla_support::gpu()?.describe();
    if !name.contains("llvmpipe") {
        return Err(Ignored(format!("{name} is not lavapipe")));
    }
    let mut again = Command::new(std::env::current_exe().expect("a path"));
    again.args(["--exact", "devices::made::a_device_without_what_its_driver_refuses", "--nocapture"]);
    let ran = again.env("LP_NATIVE_VECTOR_WIDTH", "128").output().expect("it runs");
    let said = [&ran.stdout, &ran.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(ran.status.success() && said[0].contains("1 passed"), "{}{}", said[0], said[1]);
    Ok(())
}

crate::tests![a_device_without_what_its_driver_refuses, a_software_device_of_narrow_vectors];
