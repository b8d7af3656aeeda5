use super::{Buffer, Cuda};
use crate::layer::KvView;
use crate::ops::{AppendLayer, AppendSpec, MergeStates, MergeStatesSpec};
use crate::{KvSpec, Result};
pub(super) fn merge_attn_states(_: &Cuda, _: &MergeStatesSpec, _: &MergeStates<'_, Buffer>) -> Result<()> { Ok(()) }
pub(super) fn kv_append(_: &Cuda, _: &AppendSpec, _: &[i64], _: &AppendLayer<'_, Buffer>) -> Result<()> { Ok(()) }
pub(super) fn kv_copy_pages(_: &Cuda, _: &KvSpec, _: u32, _: &[(u32, u32)], _: &KvView<'_, Buffer>) -> Result<()> { Ok(()) }
