//! `kv_copy_pages`: whole pages inside one layer's pool, for a sequence that forks.

use std::ops::Range;

use super::single::uniform;
use super::table::Table;
use crate::base::error::Result;
use crate::cache::KvView;
use crate::gpu::Gpu;
use crate::gpu::buffer::Window;
use crate::gpu::kernels::GROUP;
use crate::gpu::kernels::compose::{Const, Source, compose};
use crate::gpu::pipelines::{Access, Pipe, Pipeline, dispatch, group_with_params};
use crate::ops::variants::only;
use crate::ops::{Choice, Kernel, KvCopyPages, OpOptions, check_copies};

/// The same copy by units of 16 bytes and of a word, inside of a buffer and from one slab to another.
#[derive(Debug)]
pub struct Pipes {
    /// `None` where a page is not a multiple of 16 bytes.
    wide: Option<[Pipe; 2]>,
    words: [Pipe; 2],
}

/// A layer's cache, and the unit that its alignment allows.
#[derive(Debug)]
pub struct Layer {
    group: wgpu::BindGroup,
    pipeline: Pipeline,
    page_units: u64,
    /// The pages of the slabs that it copies from and to.
    pages: [Range<u32>; 2],
}

/// A step's copies.
#[derive(Debug, Default)]
pub struct Copies {
    table: Table,
    /// The same, for a pool in several slabs: which of them have copies.
    pairs: Vec<(u32, u32)>,
}

uniform! {
    "CopyParams":
    struct Params {
        kv_base_units: u32,
        kv_block_stride_units: u32,
        from_first_page: u32,
        from_num_pages: u32,
        to_first_page: u32,
        to_num_pages: u32,
        target_base_units: u32,
        reserved_0: u32,
    }
}

/// The unit that an invocation moves.
#[derive(Debug, Clone, Copy)]
enum Unit {
    Wide,
    Word,
}

impl Unit {
    const fn bytes(self) -> u64 {
        match self {
            Self::Wide => 16,
            Self::Word => 4,
        }
    }
}

/// Where a copy's pages are.
#[derive(Debug, Clone, Copy)]
enum Place {
    Within,
    Between,
}

impl Kernel<KvCopyPages> for Gpu {
    const SERVES_RECORDS: bool = true;
    type Kernels = Pipes;
    type Step = Copies;
    type Binding = Layer;

    fn kernel_compile(&self, spec: &KvCopyPages, options: &OpOptions) -> Result<(Pipes, (), Choice)> {
        let labels = ["mla.kv_copy_pages.step", "mla.kv_copy_pages.layer"];
        let entries = [Access::Uniform, Access::Write, Access::Read];
        // bounds: kv_copy_pages
        let compile = |unit| -> Result<[Pipe; 2]> {
            let pipe = |place, entries| Pipe::new(self, labels, entries, &source(spec, unit, place));
            Ok([pipe(Place::Within, &entries[..2])?, pipe(Place::Between, &entries)?])
        };
        let wide = if spec.page_bytes().is_multiple_of(16) { Some(compile(Unit::Wide)?) } else { None };
        Ok((Pipes { wide, words: compile(Unit::Word)? }, (), only(options)?))
    }

    fn kernel_step(&self, _: &KvCopyPages, _: &Pipes, _: u32) -> Result<Copies> {
        Ok(Copies::default())
    }

    fn kernel_prepare(
        &self,
        spec: &KvCopyPages,
        pipes: &Pipes,
        step: &mut Copies,
        copies: &[(u32, u32)],
    ) -> Result<()> {
        check_copies(&spec.kv, copies)?;
        // A binding that is not aligned to the wide unit needs more, and then refuses to be recorded.
        let unit = if pipes.wide.is_some() { Unit::Wide } else { Unit::Word };
        self.grid(copies.len() as u64 * (spec.page_bytes() / unit.bytes()))?;
        // Each copy writes a page of its own, so there are fewer than pages.
        let words = copies.iter().flat_map(|&(from, to)| [from, to]);
        step.table.upload(self, &pipes.words[0].step, copies.len() as u32, words)?;
        step.pairs.clear();
        step.pairs.extend(copies);
        Ok(())
    }

    fn kernel_bind(
        &self,
        spec: &KvCopyPages,
        pipes: &Pipes,
        view: &KvView<&wgpu::Buffer>,
        (): (),
    ) -> Result<Layer> {
        // From the first slab to the second, if there are two.
        let slabs: Vec<_> = view.each_slab().collect();
        let [from, to] = [&slabs[0], &slabs[slabs.len() - 1]];
        let place = if slabs.len() > 1 { Place::Between } else { Place::Within };
        let windows = [
            Window::of_cache(self, to, &spec.kv, &spec.shape)?,
            Window::of_cache(self, from, &spec.kv, &spec.shape)?,
        ];
        let bases = windows.each_ref().map(|window| u64::from(window.at(view.base(), 1, 1)));
        let stride = if spec.kv.num_pages > 1 { view.block_stride } else { 0 };
        let (unit, pipes) = match &pipes.wide {
            Some(wide) if (bases[0] | bases[1] | stride).is_multiple_of(16) => (Unit::Wide, wide),
            _ => (Unit::Word, &pipes.words),
        };
        let pipe = &pipes[place as usize];
        let pages = [from.pages(&spec.kv), to.pages(&spec.kv)];
        let params = Params {
            kv_base_units: (bases[1] / unit.bytes()) as u32,
            kv_block_stride_units: (stride / unit.bytes()) as u32,
            from_first_page: pages[0].start,
            from_num_pages: pages[0].len() as u32,
            to_first_page: pages[1].start,
            to_num_pages: pages[1].len() as u32,
            target_base_units: (bases[0] / unit.bytes()) as u32,
            reserved_0: 0,
        };
        let label = "mla.kv_copy_pages.layer";
        let resources = windows.iter().take(slabs.len()).map(Window::resource);
        let group = group_with_params(self, label, &pipe.layer, &params, resources)?;
        let page_units = spec.page_bytes() / unit.bytes();
        Ok(Layer { group, pipeline: pipe.pipeline.clone(), page_units, pages })
    }

    fn kernel_record(
        &self,
        spec: &KvCopyPages,
        _: &Pipes,
        pass: &mut wgpu::ComputePass<'_>,
        step: &Copies,
        layer: &Layer,
    ) -> Result<()> {
        let [from, to] = &layer.pages;
        let is_pool = to.len() == spec.kv.num_pages as usize;
        let has_copies = is_pool || step.pairs.iter().any(|(a, b)| from.contains(a) && to.contains(b));
        if let (Some(table), copies @ 1.., true) = (step.table.group(), step.table.count(), has_copies) {
            let grid = self.grid(u64::from(copies) * layer.page_units)?;
            dispatch(pass, &layer.pipeline, &[table, &layer.group], grid);
        }
        Ok(())
    }
}

fn source(spec: &KvCopyPages, unit: Unit, place: Place) -> Source {
    let (variant, ty) = match unit {
        Unit::Wide => ("wide", "vec4<u32>"),
        Unit::Word => ("words", "u32"),
    };
    let (load, variant) = match place {
        Place::Within => (include_str!("../../../shaders/lib/copy_within.wgsl"), variant.to_owned()),
        Place::Between => {
            (include_str!("../../../shaders/lib/copy_between.wgsl"), format!("{variant}.between"))
        }
    };
    let consts = [
        ("GROUP", Const::U32(GROUP)),
        ("PAGE_UNITS", Const::U32((spec.page_bytes() / unit.bytes()) as u32)),
        ("Unit", Const::Alias(ty)),
    ];
    let files = [
        include_str!("../../../shaders/lib/grid.wgsl"),
        load,
        include_str!("../../../shaders/kv_copy_pages.wgsl"),
    ];
    compose("kv_copy_pages", &format!("{variant}.{}", spec.kv.layout), &consts, &files)
}

#[cfg(test)]
impl super::Shaders for KvCopyPages {
    fn every_source(samples: &[Self]) -> Vec<Source> {
        let both = |spec| {
            [Place::Within, Place::Between]
                .into_iter()
                .flat_map(move |place| [Unit::Wide, Unit::Word].map(|unit| source(spec, unit, place)))
        };
        samples.iter().flat_map(both).collect()
    }

    fn layouts() -> Vec<super::HostLayout> {
        super::layouts_of::<Params>()
    }
}
